"""The statistics: one public transform a file."""

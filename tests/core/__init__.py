"""The core of the statistics: that it follows ordinary programs, and gives no wrong number of others."""

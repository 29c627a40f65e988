"""Private calls and state of torch, each behind a door of its own: what changes with torch changes here."""

"""`python -m tests.clients` runs all clients that are installed and writes their table into the site's page."""

from tests.clients.table import PAGE, rewritten

PAGE.write_text(rewritten(PAGE.read_text()))

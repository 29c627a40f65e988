"""Each client that is installed works, or is refused, as the site's table says."""

import pytest

from tests.clients.table import BEGIN, CLIENTS, END, HEAD, PAGE, missing, rows

pytestmark = pytest.mark.clients


def test_the_table_has_all_clients():
    page = PAGE.read_text()
    assert page.count(BEGIN) == page.count(END) == 1 and BEGIN + HEAD in page
    assert {*rows(page)} == {client.name for client in CLIENTS}
    assert all(row.count(" | ") == 2 for row in rows(page).values())


SLOW = {"transformers": pytest.mark.slow}


@pytest.mark.parametrize(
    "client", [pytest.param(c, marks=SLOW.get("".join(c.packages), ()), id=c.name) for c in CLIENTS]
)
def test_it_is_as_the_table_says(client):
    """If not, `python -m tests.clients` brings the table up to date, once it is known why."""
    if why := missing(client):
        pytest.skip(why)
    assert client.row() == rows(PAGE.read_text())[client.name]

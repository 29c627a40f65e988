"""The table of all clients, on the site's page between two markers: what works, and what is refused because of what."""

import importlib
from functools import partial
from pathlib import Path

from tests.clients import architectures, curvature, flows, privacy
from tests.clients.client import Client

PAGE = Path(__file__).parents[2] / "notebooks" / "site" / "clients.md"
BEGIN, END = "<!-- clients: begin -->\n", "<!-- clients: end -->\n"
HEAD = "| library | compared with | works | refused because |\n| --- | --- | --- | --- |\n"

CLIENTS = [
    Client("Laplace", "its own curvlinops backends", ("laplace", "curvlinops"), curvature.laplace),
    Client("curvlinops", "its own matrices, the same draws", ("curvlinops",), curvature.curvlinops),
    Client("scipy", "dense matrices", ("scipy",), curvature.scipy),
    Client("Opacus, its optimiser", "`clipped_grad`", ("opacus",), privacy.optimiser),
    Client("Opacus, fast clipping", "`clipped_grad`", ("opacus",), privacy.fast_clipping),
    *(
        Client(name, "dense Jacobians", ("normflows", "FrEIA", "zuko"), partial(flows.check, name))
        for name in ("normflows", "FrEIA", "zuko")
    ),
]


def rows(page: str) -> dict[str, str]:
    """The row of each client on the page, behind its name; several of one library may share one."""
    found = {}
    for line in page.partition(BEGIN)[2].partition(END)[0].removeprefix(HEAD).splitlines():
        names, _, row = line.removeprefix("| ").partition(" | ")
        library, colon, each = names.partition(": ")
        found |= {f"{library}{colon}{name}": row for name in each.split(", ")}
    return found


for listed in rows(PAGE.read_text()):  # models are those that the page lists, of a task in front of a colon
    task, _, kind = listed.removeprefix("transformers ").partition(": ")
    if kind:
        CLIENTS.append(Client(listed, "plain loops", ("transformers",), partial(architectures.check, task, kind)))


def missing(client: Client) -> str:
    """The reason why it cannot be imported, or nothing."""
    try:
        for package in client.packages:
            importlib.import_module(package)
    except ImportError as error:
        return str(error)
    return ""


def rewritten(page: str) -> str:
    """The page with the rows of today; a client that is not installed keeps the row that it has."""
    before, _, rest = page.partition(BEGIN)
    old = rows(page)
    new: dict[tuple[str, str], list[str]] = {}
    for client in CLIENTS:
        library, colon, name = client.name.partition(": ")
        row = old[client.name] if missing(client) else client.row()
        new.setdefault((library + colon, row), []).append(name)
    lines = [f"| {library}{', '.join(names)} | {row}\n" for (library, row), names in new.items()]
    return before + BEGIN + HEAD + "".join(lines) + END + rest.partition(END)[2]

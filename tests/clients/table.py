"""The table of all clients, on the site's page between two markers: what works, and what is refused because of what."""

import importlib
from functools import partial
from pathlib import Path

from tests.clients import architectures, curvature, flows, privacy, processes
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
        Client(f"transformers: {name}", "plain loops", ("transformers",), partial(architectures.check, name))
        for name in architectures.ELEVEN
    ),
    *(
        Client(name, "dense Jacobians", ("normflows", "FrEIA", "zuko"), partial(flows.check, name))
        for name in ("normflows", "FrEIA", "zuko")
    ),
    Client("DistributedDataParallel", "one process", (), processes.ddp),
    Client("fully_shard (FSDP2)", "one process", (), processes.fsdp2),
]


def missing(client: Client) -> str:
    """The reason why it cannot be imported, or nothing."""
    try:
        for package in client.packages:
            importlib.import_module(package)
    except ImportError as error:
        return str(error)
    return ""


def rows(page: str) -> dict[str, str]:
    """The row of each client on the page."""
    lines = page.partition(BEGIN)[2].partition(END)[0].removeprefix(HEAD).splitlines()
    return {line.split(" | ")[0].removeprefix("| "): line for line in lines}


def rewritten(page: str) -> str:
    """The page with the rows of today; a client that is not installed keeps the row that it has."""
    before, _, rest = page.partition(BEGIN)
    old = rows(page)
    new = [old[client.name] if missing(client) else client.row() for client in CLIENTS]
    return before + BEGIN + HEAD + "".join(f"{row}\n" for row in new) + END + rest.partition(END)[2]

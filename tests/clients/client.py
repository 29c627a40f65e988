"""A client: a library, the comparisons with it, and their outcome, as a row of a table."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from invfunc import InvFuncError


@dataclass
class Outcome:
    """Names of what works; names of what is refused, with the reason."""

    works: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def refuse(self, what: str, error: InvFuncError) -> None:
        """The first sentence of an error, without the call and the place, and with the last name of a parameter."""
        first = re.split(r"(?<=[.:]) |\n", str(error).partition(": ")[2])[0].rstrip(".:")
        first = re.sub(r" \([^()]+:\d+, in [^()]+\)", "", first)  # the place
        first = re.sub(r"params\['(?:[^']*?\.)?([^'.]+(?:\.weight)?)'\]", r"`\1`", first)
        text = f"{what}: {type(error).__name__}, {first}"
        if text not in self.refused:
            self.refused.append(text)


@dataclass(frozen=True)
class Client:
    """A library whose way and ours are compared."""

    name: str
    against: str
    packages: tuple[str, ...]
    check: Callable[[], Outcome]

    def row(self) -> str:
        """Its row behind the name."""
        outcome = self.check()
        cells = self.against, "; ".join(outcome.works), "; ".join(outcome.refused)
        return " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def assert_near(found: dict, wanted: dict, tolerance: float = 1e-6) -> None:
    """Equal to so much of the largest entry of each tensor."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        difference, scale = (found[name] - value).abs().max(), value.abs().max()
        assert difference <= tolerance * scale.clamp(min=torch.finfo(value.dtype).eps), (name, difference, scale)

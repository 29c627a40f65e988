"""One planted fault."""

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Fault:
    """`new` in the place of `old` in a file of the library, and the tests of which one should fail."""

    name: str
    file: str
    old: str
    new: str
    tests: str
    """Files, folders and single tests (`file.py::Laws::test_one`) of `tests`."""

    def planted(self, source: str) -> str:
        """The source of the file with the fault."""
        if source.count(self.old) != 1:
            raise ValueError(f"{self.name!r}: {self.file} has its text {source.count(self.old)} times: {self.old!r}")
        return source.replace(self.old, self.new)

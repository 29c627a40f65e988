"""Lists of faults, one for each part of the library: TOML tables of the fields of a `Fault`."""

import tomllib
from pathlib import Path

from tests.mutants.fault import Fault

FILES = sorted(Path(__file__).parent.glob("*.toml"))
FAULTS = [Fault(**fields) for file in FILES for fields in tomllib.loads(file.read_text())["fault"]]

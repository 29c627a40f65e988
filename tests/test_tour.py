"""`python -m invfunc`: the table, and one clear line for whatever cannot be."""

import re
import subprocess
import sys

import pytest

from invfunc.__main__ import main


@pytest.mark.slow
def test_tour_prints_a_table():
    command = [sys.executable, "-m", "invfunc", "--chunks", "8", "64"]
    tour = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert tour.returncode == 0, tour.stderr
    said = [line for line in tour.stderr.splitlines() if "font" not in line]  # of those that a machine lacks
    assert said == []  # no progress bar where there is no terminal
    for row in ("by structure", "8 chunks", "64 chunks", "variance", "norms", "64 reversible blocks", "plain autograd"):
        assert row in tour.stdout
    assert re.search(r"^\d+ times faster, \d+ times less memory, the same numbers \(to \de-0\d\)$", tour.stdout, re.M)


@pytest.mark.quick
def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    assert all(option in text for option in ("--device", "--chunks"))


@pytest.mark.parametrize("package", ["sklearn", "tqdm"])
def test_missing_package_names_the_extra(package, monkeypatch):
    for name in {package, *sys.modules}:
        if name.partition(".")[0] == package:
            monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SystemExit) as left:
        main([])
    (line,) = left.value.code.splitlines()  # which Python prints, and ends with code 1
    assert package in line and "pip install 'invfunc[notebooks]'" in line

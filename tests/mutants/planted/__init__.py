"""The faults: of the core, the statistics, what is chunked, streamed or planned, and invertible functions."""

from tests.mutants.planted import core, invertible, scale, statistics

FAULTS = [*core.FAULTS, *statistics.FAULTS, *scale.FAULTS, *invertible.FAULTS]

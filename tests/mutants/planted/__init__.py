"""The faults: of the core, of the statistics over it, of what is chunked, streamed or planned, of invertible functions."""

from tests.mutants.planted import core, invertible, scale, statistics

FAULTS = [*core.FAULTS, *statistics.FAULTS, *scale.FAULTS, *invertible.FAULTS]

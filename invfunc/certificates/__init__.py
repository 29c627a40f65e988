"""Results that are checked in the same call: numbers of another code path at drawn entries, up to rounding."""

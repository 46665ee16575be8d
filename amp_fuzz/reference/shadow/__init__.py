"""Shadow arithmetic: how far rounding can move each value of a run."""

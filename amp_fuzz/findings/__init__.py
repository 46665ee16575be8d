"""From a divergence to a report: guilty op, cause, group, smaller case, repro."""

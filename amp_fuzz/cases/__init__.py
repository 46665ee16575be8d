"""What a case is: program, plan, input values. Frozen data, with neither torch nor Hypothesis."""

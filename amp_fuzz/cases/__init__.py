"""Cases: program, plan, input values. Frozen data, without torch and Hypothesis."""

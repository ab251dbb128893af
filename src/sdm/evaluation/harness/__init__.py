"""Short-context tasks by lm-evaluation-harness, the extra `eval`, which is imported when it is used."""

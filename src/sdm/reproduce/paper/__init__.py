"""`sdm reproduce paper`: the runs of the paper at its own sizes, as folders and commands for machines with GPUs."""

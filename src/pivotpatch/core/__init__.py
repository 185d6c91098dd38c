"""The mathematics of the paper: one function an equation; imports torch and nothing else."""

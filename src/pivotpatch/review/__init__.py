"""People look at tags: which images first, decisions that outlive a crash, a page for keyboard and touch."""

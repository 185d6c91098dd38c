"""Training: a schema, tasks that are model and loss in one, and one loop."""

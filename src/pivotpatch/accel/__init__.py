"""The same model in fewer passes over memory."""

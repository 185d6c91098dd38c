"""The web page and its HTTP endpoint: tags for dropped pictures, and why."""

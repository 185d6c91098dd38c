"""The web page and its HTTP endpoint: tags for dropped images, and why."""

"""The HTTP routes, one module for each concept. Routes contain no logic of their own."""

"""The HTTP routes: each module holds the ones of one concept, and no logic of its own."""

"""A package for pytest, so that its tests share one browser and other tests have none; see conftest.py."""

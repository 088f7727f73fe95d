"""Timing never decides a test: no deadlines for generated examples."""

from hypothesis import settings

settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")

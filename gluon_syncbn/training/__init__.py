"""Holds the parts of a training loop. Changes of nets before and after a loop are in ``nets``."""

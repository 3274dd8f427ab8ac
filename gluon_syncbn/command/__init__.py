"""Brings the package into a process: the command line, and replacements for scripts that run unedited."""

"""Brings the package into a process: the effects of an import, the command line, and scripts that run unedited.
The replacements for such scripts also work without the command line.
"""

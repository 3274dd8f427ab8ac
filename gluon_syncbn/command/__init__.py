"""Brings the package into a process: the command line, and scripts that run unedited.
The replacements for such scripts also work without the command line.
"""

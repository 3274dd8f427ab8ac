"""The command line: the self-check, and training scripts that run unedited with this package.
The replacements that such a script gets can be had without the command line, too.
"""

"""How the package enters a process: what an import changes, the command line, and scripts that run unedited.
The replacements that such a script gets can be had without the command line, too.
"""

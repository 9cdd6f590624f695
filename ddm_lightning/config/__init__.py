"""The experiment file; nothing here imports torch or Lightning.

- ``experiment``: its schema, with a line of documentation per field
- ``merge``: merge settings; the section of one expert
- ``load``: merge a YAML file with overrides, check it, write it out again, describe its keys
- ``validate``: refuse contradictions between fields
"""

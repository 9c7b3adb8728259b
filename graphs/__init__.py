"""The graphs that ship with dflash_pipe, as YAML files; found by `importlib.resources.files("graphs")`."""

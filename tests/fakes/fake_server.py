"""A fake server: /health, children, ignored signals and crashes on demand. Standard library only.

The code is in a module because Python caches the bytecode of modules, but not of the program it runs.
"""

from fake_serving import main

main()

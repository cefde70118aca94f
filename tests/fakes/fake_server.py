"""A fake server: /health, children, ignored signals and crashes on demand. Standard library only.

Python compiles the program that it runs anew at each start: what this one does is in a module, whose bytecode is kept.
"""

from fake_serving import main

main()

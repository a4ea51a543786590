"""`python -m bench report`: what the project claims, measured on the machine at hand by real processes.

`pair` makes the models, `runs` starts the trainings, each claim of `sections` reads them, `page` writes what was found.
"""

"""Programs of passes and steps as data: events of the model, with the gathers and frees before each event.

`entries` defines the data, and `compiler` turns a recorded trace into a program. Both are pure. `book` stores the
program of each kind of pass, and `steps` stores programs of complete steps within a budget. `executor` follows the
programs, and `agreement` compares the ranks.
"""

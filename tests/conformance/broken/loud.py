"""A command that greets whoever looks at it."""

from broken.commands import good

print("thank you for installing")
app = good

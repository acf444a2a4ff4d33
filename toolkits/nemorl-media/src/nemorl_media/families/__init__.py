"""How families of models see and hear, a file each."""

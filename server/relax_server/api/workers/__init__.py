"""`relax serve --workers N`: several processes behind one port, and what they tell each other."""

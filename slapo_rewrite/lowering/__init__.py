"""From what a schedule asks to changes of classes, and which of their instances share a text."""

"""Pictures that explain: how an image becomes tokens, how positions are laid out."""

"""A vision-language model inside other people's evaluation frameworks, each imported only by the module of its name."""

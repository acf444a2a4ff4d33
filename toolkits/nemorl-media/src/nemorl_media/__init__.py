"""Images and sounds: decoding with limits, processing, expansion into token ids, and how each family of models sees."""

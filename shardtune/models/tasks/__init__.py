"""Tasks by name: classifiers, regression, embeddings, rerankers, encoder-decoders; an adapter in one file each."""

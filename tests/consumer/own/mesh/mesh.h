// Of the same name as a header of the library, and nothing to do with it.
#error "not this one"

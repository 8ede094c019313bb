//! Advanced Matrix Extensions.

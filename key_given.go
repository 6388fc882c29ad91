package ratelimit

import (
	"fmt"
	"net/netip"
)

// This file finds identities for operators, who have no request but know whom they mean.

// identityOf returns the ID for the values of the key's placeholders, given in their order. A client address may be any of its
// network. Values that Caddy would have refined (a host, a method) are expected in that form.
func (k *keyTemplate) identityOf(values []string, h *hasher) (ID, error) {
	d := h.digests.Get().(*digest)
	defer h.digests.Put(d)
	d.sum.Reset()
	d.text(k.canonical)
	rest := values
	for i := range k.parts {
		p := &k.parts[i]
		if p.name == "" {
			continue
		}
		if p.constant {
			value, _ := p.value(nil, nil)
			d.text(value)
			continue
		}
		if len(rest) == 0 || rest[0] == "" {
			return ID{}, fmt.Errorf("the key has a value for each of %v, got %d", k.names(), len(values))
		}
		if err := p.hashGiven(d, rest[0]); err != nil {
			return ID{}, err
		}
		rest = rest[1:]
	}
	if len(rest) > 0 {
		return ID{}, fmt.Errorf("the key has a value for each of %v, got %d", k.names(), len(values))
	}
	return d.id(), nil
}

func (p *keyPart) hashGiven(d *digest, value string) error {
	if p.address == nil {
		d.text(value)
		return nil
	}
	addr, err := netip.ParseAddr(value)
	if err != nil {
		return fmt.Errorf("{%s} is an address, got %q", p.name, value)
	}
	network, err := p.group(addr)
	if err != nil {
		return err
	}
	d.network(network)
	return nil
}

package ratelimit

import (
	"fmt"
	"slices"
	"strings"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// This file says which commands `caddy rate-limit` has and what each of them takes. What they send and print is in
// command_show.go, command_change.go and command_explain.go.

func init() {
	caddycmd.RegisterCommand(caddycmd.Command{
		Name:  "rate-limit",
		Usage: "<command> [--address <interface>] [--config <path> [--adapter <name>]] [--json]",
		Short: "Shows what the rate limits of a running Caddy do, and changes it",
		Long: `
Shows what the rate limits of a running Caddy do, to whom and why, and changes it.

It asks the admin endpoint of Caddy: that of --address, like localhost:2019 or unix//run/caddy/admin.sock; else that of
the configuration in --config; else the default.

Clients are named as a zone of the configuration knows them: by the values of the placeholders in its key, in their
order. Any address of a network that is counted together will do. Or by the id that logs and lists show.
`,
		CobraFunc: addCommands,
	})
}

// command is one of the commands.
type command struct {
	use, short, long string
	// takes adds the flags of the command to those that all have.
	takes func(*pflag.FlagSet)
	// needs says what is wrong with arguments and flags, nil if nothing is.
	needs func(flags *pflag.FlagSet, args []string) error
	run   func(s *session, args []string) error
}

var commands = []command{commandStatus, commandZones, commandInspect, commandExplain, commandBlocks, commandBlock,
	commandUnblock, commandReset, commandOverride, commandTop}

func addCommands(parent *cobra.Command) {
	flags := parent.PersistentFlags()
	flags.String("address", "", "Address of the administration listener, if different from config")
	flags.StringP("config", "c", "", "Configuration file that says where the administration listener is")
	flags.StringP("adapter", "a", "", "Name of config adapter to apply (when --config is used)")
	flags.Bool("json", false, "Print the answer as it came, as JSON")
	parent.Args = cobra.ArbitraryArgs
	parent.RunE = func(cmd *cobra.Command, args []string) error {
		if len(args) == 0 {
			return cmd.Help()
		}
		return fmt.Errorf("there is no command %q: use one of %s", args[0], strings.Join(commandNames(), ", "))
	}
	for _, c := range commands {
		parent.AddCommand(c.cobra())
	}
}

func commandNames() []string {
	var names []string
	for _, c := range commands {
		name, _, _ := strings.Cut(c.use, " ")
		names = append(names, name)
	}
	return names
}

// cobra returns the command as Caddy runs it. An error is one line on standard error, and exit code 1.
func (c command) cobra() *cobra.Command {
	cmd := &cobra.Command{Use: c.use, Short: c.short, Long: strings.TrimSpace(c.long), SilenceUsage: true}
	if c.takes != nil {
		c.takes(cmd.Flags())
	}
	cmd.Args = func(cmd *cobra.Command, args []string) error {
		if c.needs == nil {
			return takesAtMost(0)(cmd.Flags(), args)
		}
		return c.needs(cmd.Flags(), args)
	}
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		s, err := newSession(cmd)
		if err != nil {
			return err
		}
		return c.run(s, args)
	}
	return cmd
}

// takesAtMost bounds the number of arguments.
func takesAtMost(most int) func(*pflag.FlagSet, []string) error {
	return func(_ *pflag.FlagSet, args []string) error {
		if len(args) > most {
			return fmt.Errorf("%q is one argument too many", args[most])
		}
		return nil
	}
}

// whoFlags lets a client be named by its id.
func whoFlags(flags *pflag.FlagSet) {
	flags.String("id", "", "The client by the id that logs and lists show, instead of by the values of a key")
}

// needsClientIn wants a zone, and a client by its key or its id.
func needsClientIn(flags *pflag.FlagSet, args []string) error {
	if (len(args) == 1) == (flagText(flags, "id") != "") && len(args) > 0 {
		return nil
	}
	return fmt.Errorf("name a zone and the values of its key, as in `login 203.0.113.7`, or a zone and an id, as in `login --id <id>`; got %s",
		listed(args))
}

// needsClient wants a client by a zone and its key, or by its id.
func needsClient(flags *pflag.FlagSet, args []string) error {
	if flagText(flags, "id") != "" && len(args) == 0 || flagText(flags, "id") == "" && len(args) > 1 {
		return nil
	}
	return fmt.Errorf("name a zone and the values of its key, as in `login 203.0.113.7`, or only an id, as in `--id <id>`; got %s",
		listed(args))
}

func listed(args []string) string {
	if len(args) == 0 {
		return "nothing"
	}
	quoted := slices.Clone(args)
	for i := range quoted {
		quoted[i] = clean(quoted[i])
	}
	return strings.Join(quoted, " ")
}

// flagText returns the value of a flag, empty if the command has no such flag.
func flagText(flags *pflag.FlagSet, name string) string {
	if flag := flags.Lookup(name); flag != nil {
		return flag.Value.String()
	}
	return ""
}

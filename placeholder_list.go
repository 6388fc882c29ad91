package ratelimit

// This file lists the placeholders that have a meaning in a key, and those that people take for them.

const (
	changesAlways = "it changes with every request, so nobody would ever be limited"
	changesPort   = "the port changes with every connection; write {" + nameRemoteHost + "}"
	changesBody   = "the client writes any body it likes, and reading it holds up the request"
	knownLater    = "it is known only after the limit has decided"
	takenOut      = "the server takes this header out of the request before anybody can read it"
	anyPort       = "the client writes any port it likes into its Host header; write {http.request.host}, or {http.request.local.port} for the port"
)

// placeholders are those that Caddy and this package define. A name that ends in a star stands for all that begin with it.
// What is not here belongs to other handlers and plugins, and may hold anything about the client. The table never changes.
var placeholders = map[string]placeholder{
	nameClientIP:   {origin: fromAddress},
	nameRemoteHost: {origin: fromAddress},

	prefixHeader + "*": {origin: fromWords},
	prefixCookie + "*": {origin: fromWords},
	prefixQuery + "*":  {origin: fromWords},

	"http.request.method":                     {origin: fromRequest},
	"http.request.scheme":                     {origin: fromRequest},
	"http.request.proto":                      {origin: fromRequest},
	"http.request.proto_name":                 {origin: fromRequest},
	"http.request.host":                       {origin: fromRequest},
	"http.request.host.labels.*":              {origin: fromRequest},
	"http.request.local":                      {origin: fromRequest},
	"http.request.local.host":                 {origin: fromRequest},
	"http.request.local.port":                 {origin: fromRequest},
	"http.request.uri.path":                   {origin: fromRequest},
	"http.request.uri.path.*":                 {origin: fromRequest},
	"http.request.uri.path_escaped":           {origin: fromRequest},
	"http.request.uri.path.dir":               {origin: fromRequest},
	"http.request.uri.path.file":              {origin: fromRequest},
	"http.request.uri.path.file.base":         {origin: fromRequest},
	"http.request.uri.path.file.ext":          {origin: fromRequest},
	"http.request.orig_method":                {origin: fromRequest},
	"http.request.orig_uri.path":              {origin: fromRequest},
	"http.request.orig_uri.path.*":            {origin: fromRequest},
	"http.request.orig_uri.path.dir":          {origin: fromRequest},
	"http.request.orig_uri.path.file":         {origin: fromRequest},
	"http.request.orig_uri.path.file_escaped": {origin: fromRequest},

	"http.request.uri":                     {origin: fromRawRequest},
	"http.request.uri_escaped":             {origin: fromRawRequest},
	"http.request.uri.query":               {origin: fromRawRequest},
	"http.request.uri.query_escaped":       {origin: fromRawRequest},
	"http.request.uri.prefixed_query":      {origin: fromRawRequest},
	"http.request.orig_uri":                {origin: fromRawRequest},
	"http.request.orig_uri.query":          {origin: fromRawRequest},
	"http.request.orig_uri.prefixed_query": {origin: fromRawRequest},

	"http.request.tls.version":                       {origin: fromRequest},
	"http.request.tls.cipher_suite":                  {origin: fromRequest},
	"http.request.tls.resumed":                       {origin: fromRequest},
	"http.request.tls.proto":                         {origin: fromRequest},
	"http.request.tls.proto_mutual":                  {origin: fromRequest},
	"http.request.tls.server_name":                   {origin: fromRequest},
	"http.request.tls.ech":                           {origin: fromRequest},
	"http.request.tls.client.fingerprint":            {origin: fromClient},
	"http.request.tls.client.public_key":             {origin: fromClient},
	"http.request.tls.client.public_key_sha256":      {origin: fromClient},
	"http.request.tls.client.issuer":                 {origin: fromClient},
	"http.request.tls.client.serial":                 {origin: fromClient},
	"http.request.tls.client.subject":                {origin: fromClient},
	"http.request.tls.client.certificate_pem":        {origin: fromClient},
	"http.request.tls.client.certificate_der_base64": {origin: fromClient},
	"http.request.tls.client.san.dns_names":          {origin: fromClient},
	"http.request.tls.client.san.dns_names.*":        {origin: fromClient},
	"http.request.tls.client.san.emails":             {origin: fromClient},
	"http.request.tls.client.san.emails.*":           {origin: fromClient},
	"http.request.tls.client.san.ips":                {origin: fromClient},
	"http.request.tls.client.san.ips.*":              {origin: fromClient},
	"http.request.tls.client.san.uris":               {origin: fromClient},
	"http.request.tls.client.san.uris.*":             {origin: fromClient},

	"http.vars.trusted_proxy":     {origin: fromRequest},
	"http.matchers.file.*":        {origin: fromRequest},
	"http.intercept.status_code":  {origin: fromRequest},
	"http.reverse_proxy.header.*": {origin: fromClient}, // forward_auth gives away who it is this way
	"env.*":                       {origin: fromRequest},
	"file.*":                      {origin: fromRequest},
	"system.*":                    {origin: fromRequest},

	"http.request.remote":                   {fromNowhere, changesPort},
	"http.request.remote.port":              {fromNowhere, changesPort},
	"http.request.hostport":                 {fromNowhere, anyPort},
	"http.request.port":                     {fromNowhere, anyPort},
	"http.request.uuid":                     {fromNowhere, changesAlways},
	"http.request.duration":                 {fromNowhere, changesAlways},
	"http.request.duration_ms":              {fromNowhere, changesAlways},
	"http.request.body":                     {fromNowhere, changesBody},
	"http.request.body_base64":              {fromNowhere, changesBody},
	"http.request.header.Host":              {fromNowhere, takenOut + "; write {http.request.host}"},
	"http.request.header.Transfer-Encoding": {fromNowhere, takenOut},
	"http.request.header.Trailer":           {fromNowhere, takenOut},
	"http.request.header.Cookie":            {fromNowhere, "a client is somebody else with every cookie it adds; name the one that counts, like {http.request.cookie.session}"},
	"http.vars.start_time":                  {fromNowhere, changesAlways},
	"http.vars.uuid":                        {fromNowhere, changesAlways},
	"http.vars.trace_id":                    {fromNowhere, changesAlways},
	"http.vars.span_id":                     {fromNowhere, changesAlways},
	"http.shutting_down":                    {fromNowhere, "it changes when the server stops, and everybody would start with a full bucket"},
	"http.time_until_shutdown":              {fromNowhere, changesAlways},
	"http.response.*":                       {fromNowhere, knownLater},
	"http.reverse_proxy.*":                  {fromNowhere, knownLater},
	"http.error":                            {fromNowhere, knownLater},
	"http.error.*":                          {fromNowhere, knownLater},
	"http.rate_limit.*":                     {fromNowhere, knownLater},
	"time.*":                                {fromNowhere, changesAlways},
}

// mistakes are the names that people write for something else, without dots, dashes and underscores and without the
// beginnings `http.` and `http.request.`: {http.request.remote_ip} stands in tutorials, and has never existed.
var mistakes = map[string]string{
	"ip":            "client_ip",
	"ipaddress":     "client_ip",
	"clientip":      "client_ip",
	"clientaddr":    "client_ip",
	"clientaddress": "client_ip",
	"realip":        "client_ip",
	"remoteip":      "client_ip",
	"remoteaddr":    "client_ip",
	"remoteaddress": "client_ip",
	"sourceip":      "client_ip",
	"srcip":         "client_ip",
	"xforwardedfor": "client_ip",
	"xrealip":       "client_ip",
	"remotehost":    "remote_host",
	"useragent":     "http.request.header.User-Agent",
	"authorization": "http.request.header.Authorization",
}

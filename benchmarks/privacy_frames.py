"""Sentences of the generated privacy benchmark, by language and subject; "{}" is replaced by a generated value.

They were written before the patterns that they measure were changed. Of each list, the first half is used for
development and the second half for the reported figures.
"""

from __future__ import annotations

# What a number is called: ID is replaced by the name of the number, such as CPF or Steuer-ID.
IDENTITY = {
    "en": ["My ID is {}.", "ID: {}", "ID number {}, please check it", "here is the ID you wanted: {}"],
    "pt": ["meu ID é {}", "ID: {}", "ID do cliente {} conferido", "Segue o ID para a nota: {}"],
    "es": ["mi ID es {}", "ID: {}", "con ID {} y domicilio en Lugo", "Le paso el ID del titular: {}"],
    "fr": ["mon ID est le {}", "ID : {}", "ID n° {} au dossier", "Voici l'ID demandé : {}"],
    "de": ["meine ID ist {}", "ID: {}", "ID {} liegt bei", "Hier die ID des Mandanten: {}"],
    "it": ["il mio ID è {}", "ID: {}", "ID {} come da modulo", "Ecco l'ID del paziente: {}"],
    "pl": ["mój ID to {}", "ID: {}", "ID {} zgodny z dowodem", "Podaję ID pacjenta: {}"],
}
# The same number where nothing says what it is.
UNNAMED = {
    "en": ["It is {} on my card.", "they asked for {} again"],
    "pt": ["No cadastro está {}.", "consta {} no sistema"],
    "es": ["En la ficha pone {}.", "me piden {} otra vez"],
    "fr": ["Sur la fiche il y a {}.", "on me redemande {}"],
    "de": ["Auf dem Blatt steht {}.", "man fragt wieder nach {}"],
    "it": ["Sulla scheda c'è {}.", "mi chiedono ancora {}"],
    "pl": ["Na karcie jest {}.", "znowu pytają o {}"],
}
PHONE = {
    "en": ["Call me on {}", "my mobile: {}", "You can reach her at {} until five.", "Tel {} / ask for Jo"],
    "pt": ["Me liga no {}", "Telefone: {}", "O celular dela é {} até as cinco.", "WhatsApp {} (Bia)"],
    "es": ["Llámame al {}", "Teléfono: {}", "Su móvil es el {} hasta las cinco.", "Tel. {} (Ana)"],
    "fr": ["Appelez-moi au {}", "Téléphone : {}", "Son portable est le {} jusqu'à cinq heures.", "Tél. {} (Zoé)"],
    "de": ["Ruf mich an: {}", "Telefon: {}", "Ihr Handy ist {} bis fünf Uhr.", "Tel. {} (Uwe)"],
    "it": ["Chiamami al {}", "Telefono: {}", "Il suo cellulare è {} fino alle cinque.", "Tel. {} (Pia)"],
    "pl": ["Zadzwoń: {}", "Telefon: {}", "Jej komórka to {} do piątej.", "tel. {} (Ewa)"],
    "ja": ["電話番号は{}です。", "TEL: {}", "携帯 {} までご連絡ください", "連絡先:{}"],
}
ADDRESS = {
    "en": ["I live at {}", "Address: {}", "Please send the parcel to {} today.", "billing address\n{}\nthanks"],
    "pt": ["Moro na {}", "Endereço: {}", "Mande a encomenda para {} hoje.", "endereço de cobrança\n{}\nobrigado"],
    "es": ["Vivo en {}", "Dirección: {}", "Envíe el paquete a {} hoy.", "dirección de facturación\n{}\ngracias"],
    "fr": ["J'habite au {}", "Adresse : {}", "Envoyez le colis au {} ce jour.", "adresse de facturation\n{}\nmerci"],
    "de": ["Ich wohne in der {}", "Adresse: {}", "Bitte das Paket an {} heute.", "Rechnungsadresse\n{}\ndanke"],
    "it": ["Abito in {}", "Indirizzo: {}", "Spedite il pacco a {} oggi.", "indirizzo di fatturazione\n{}\ngrazie"],
}
# Forms in which anything can be the value, a phrase of several words too.
QUOTED_PASSWORD = {
    "en": ['"password": "{}"', "password = '{}'", 'db_password: "{}"', "'admin_passwd' => '{}'"],
    "pt": ['"senha": "{}"', "senha = '{}'"],
    "es": ['"contraseña": "{}"', "contraseña = '{}'"],
    "fr": ['"mot de passe": "{}"', '"mot_de_passe": "{}"'],
    "de": ['"passwort": "{}"', "Kennwort: '{}'"],
    "it": ["\"password\": '{}'", 'parola d\'ordine: "{}"'],
    "pl": ['"hasło": "{}"', 'hasło: "{}"'],
}
PLAIN_PASSWORD = {
    "en": [
        "MYSQL_ROOT_PASSWORD={}",
        "password: {}",
        "export PGPASSWORD={}",
        "Username: jo\nPassword: {}\nURL: intranet",
    ],
    "pt": ["senha: {}", "usuário jo, senha: {}", "Senha do wifi: {}", "login: jo\nsenha: {}"],
    "es": ["contraseña: {}", "usuario jo, contraseña: {}", "Contraseña del wifi: {}", "usuario: jo\nclave: {}"],
    "fr": ["mot de passe : {}", "identifiant jo, mot de passe : {}", "Mot de passe wifi : {}", "login : jo\nmdp : {}"],
    "de": ["Passwort: {}", "Benutzer jo, Passwort: {}", "WLAN-Passwort: {}", "Benutzer: jo\nKennwort: {}"],
    "it": ["password: {}", "utente jo, password: {}", "Password del wifi: {}", "utente: jo\nparola d'ordine: {}"],
    "pl": ["hasło: {}", "login jo, hasło: {}", "Hasło do wifi: {}", "login: jo\nhasło: {}"],
}
MAIL = {
    "en": ["write to {} please", "e-mail: {}"],
    "pt": ["escreva para {} por favor", "e-mail: {}"],
    "es": ["escriba a {} por favor", "correo: {}"],
    "fr": ["écrivez à {} svp", "courriel : {}"],
    "de": ["bitte an {} schreiben", "E-Mail: {}"],
    "it": ["scrivi a {} per favore", "posta: {}"],
    "pl": ["proszę pisać na {} dzisiaj", "e-mail: {}"],
    "ja": ["{} までメールしてください", "メール: {}"],
}
# (before the domain, before its last label), in the words of a language and in those that all use.
AT_AND_DOT = {
    "en": [(" at ", " dot "), ("[at]", "[dot]"), (" (at) ", " (dot) "), (" AT ", " DOT ")],
    "pt": [(" arroba ", " ponto "), ("(arroba)", "(ponto)")],
    "es": [(" arroba ", " punto "), ("[arroba]", "[punto]")],
    "fr": [(" arobase ", " point "), ("(arobase)", "(point)")],
    "de": [(" at ", " punkt "), ("(at)", "(punkt)"), ("[ät]", "."), (" (at) ", ".")],
    "it": [(" chiocciola ", " punto "), ("(chiocciola)", "(punto)")],
    "pl": [(" małpa ", " kropka "), ("(małpa)", "(kropka)")],
}
CODES = {
    "CREDIT_CARD": ["charge {} now", "card number: {}", "pan={}&exp=0929", "tarjeta {} caducada"],
    "IBAN": ["transfer it to {}", "IBAN: {}", "compte {} svp", '{{"iban": "{}"}}'],
    "IP_ADDRESS": ["login from {}", "client {} was blocked", "{} - - GET /index.html", "ssh deploy@{}"],
    "US_SSN": ["my SSN is {}", "SSN: {}", "social security number {}", "ssn={}"],
    "URL_CREDENTIALS": [
        "postgres://{}@{h}/app",
        "redis://{}@{h}:6379/0",
        "DATABASE_URL=mysql://{}@{h}/x",
        "https://{}@{h}/",
    ],
}

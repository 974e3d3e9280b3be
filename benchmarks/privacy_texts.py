"""The labelled texts of the privacy benchmark. Every person, number and key in them is invented."""

from __future__ import annotations

import base64
import hashlib
import string
from dataclasses import dataclass

from privacy_values import HEX, UPPER, URLSAFE, card, iban, jwt, noise, pem


@dataclass(frozen=True)
class Labelled:
    """A text and the private value that it contains."""

    type: str
    text: str
    value: str


# (text, value): the value replaces "{}" in the text.
_EMAIL = [
    ("Please write to {} before Friday.", "marta.lindqvist@nordhaven-labs.se"),
    ("cc: {}; the invoice is attached", "o.adeyemi+billing@gmail.com"),
    ("From: Tomasz <{}>\nSubject: Re: lunch", "tomasz_w@poczta.onet.pl"),
    ("git config user.email {}", "dev-jun@kitsune.co.jp"),
    ("my address is {}, the old one is dead", "HELENA.ROCHA@UOL.COM.BR"),
    ('{{"user": "{}", "plan": "pro"}}', "kwame99@proton.me"),
    ("mailto:{}?subject=Offer", "sales@blauer-reiter-moebel.de"),
    ("ssh key comment: {}", "priya@build7.corp.internal"),
    ("INSERT INTO users VALUES (7, '{}');", "x.y.z@students.uni-graz.ac.at"),
    ("Contact\t{}\tUrgent", "n.o'dowd@dublincity.ie"),
]
_PHONE = [
    ("Call me at {} after six.", "+1 415-732-6094"),
    ("Tel. {}", "(212) 736-5081"),
    ("WhatsApp: {}", "+44 7700 912345"),
    ("my number is {}, text first", "617-455-0182"),
    ("Standort Berlin, Telefon {}", "+49 30 4715 2290"),
    ("appelez le {} pour un devis", "+33 1 56 42 80 17"),
    ("phone={}&lang=en", "+919845012376"),
    ("reach the desk on {}", "+61 2 9374 4012"),
    ("Fax {} (office)", "020 7946 3810"),
    ("Mobile {}.", "+1-646-555-7312"),
]
_CARD = [
    ("Charge {} please", card("4539", 16)),
    ("card: {} exp 09/29", card("5412", 16, 4)),
    ("Amex {}", card("3714", 15)),
    ("my visa is {} and it was declined", card("4716", 16, 4)),
    ('"pan": "{}"', card("6011", 16)),
    ("Kartennummer {}", card("5198", 16)),
    ("{} was used twice", card("4024", 16)),
    ("paid with {}", "-".join(card("4485", 16, 4).split())),
    ("cc={};cvv=411", card("5277", 16)),
    ("diners club {}", card("3056", 14)),
]
_IBAN = [
    ("Transfer to {} today", iban("DE", "370400440532013000")),
    ("IBAN {}", iban("GB", "NWBK60161331926819", True)),
    ("compte {}", iban("FR", "20041010050500013M02606", True)),
    ("rekening {} graag", iban("NL", "ABNA0417164300")),
    ("conto: {}", iban("IT", "X0542811101000000123456")),
    ("cuenta {}", iban("ES", "21000418450200051332", True)),
    ("Konto {}", iban("AT", "1904300234573201")),
    ("salary account {}", iban("PL", "109010140000071219812874")),
    ("pay {} EUR 40", iban("BE", "539007547034", True)),
    ('{{"iban":"{}"}}', iban("CH", "00762011623852957")),
]
_IP = [
    ("login from {} at 03:12", "203.0.113.77"),
    ("Blocked {} by the firewall", "198.51.100.23"),
    ("client_ip={} status=403", "81.2.69.142"),
    ("ping {}", "2a01:4f8:c17:85a3::8a2e:7334"),
    ("allow {};", "172.217.22.14"),
    ("Received: from mail ([{}])", "93.184.216.34"),
    ("src {} dst port 443", "185.199.108.153"),
    ("ssh root@{}", "45.33.32.156"),
    ("peer {} timed out", "2a02:26f0:dc::5c7a:1f3b"),
    ("http://{}:8080/status is down", "151.101.65.69"),
]
_SSN = [
    ("SSN: {}", "536-22-8714"),
    ("my social security number is {}", "219-48-0935"),
    ("ssn={}&dob=1980-02-11", "401-67-3352"),
    ("Employee 7, {}, hired 2019", "287-65-4390"),
    ("tax id {} (individual)", "612-40-7781"),
    ("he gave {} as his social", "153-81-2269"),
    ("| Name | {} | NY |", "078-44-9120"),
    ("SSN {}", "445 91 6023"),
    ("Last, First {} M", "330-59-8846"),
    ('"social": "{}"', "502-73-1184"),
]
_KEY = [
    ("aws_access_key_id = {}", "AKIA" + noise("aws", 16, UPPER)),
    ("export AWS_SECRET_ACCESS_KEY={}", noise("aws secret", 40, string.ascii_letters + string.digits + "/+")),
    ("maps key {}", "AIza" + noise("gcp", 35, URLSAFE)),
    ("git clone with {}", "gh" + "p_" + noise("github", 36)),
    ("token: {}", "github_" + "pat_" + noise("fine", 22) + "_" + noise("grained", 59)),
    (
        "slack bot {}",
        "xox" + "b-" + "-".join([noise("a", 12, string.digits), noise("b", 12, string.digits), noise("c", 24)]),
    ),
    ("openai.api_key = '{}'", "sk" + "-" + "proj-" + noise("openai", 48)),
    ("huggingface-cli login --token {}", "hf" + "_" + noise("hf", 34, string.ascii_letters)),
    (
        "DefaultEndpointsProtocol=https;AccountName=blobs;AccountKey={};EndpointSuffix=core.windows.net",
        base64.b64encode(hashlib.sha512(b"azure").digest()).decode(),
    ),
    ("stripe {}", "sk" + "_live_" + noise("stripe", 24)),
    ("key for claude: {}", "sk" + "-ant-" + "api03-" + noise("anthropic", 93, URLSAFE) + "AA"),
    ("CI uses {}", "gl" + "pat-" + noise("gitlab", 20, URLSAFE)),
]
_TOKEN = [
    ("Authorization: Bearer {}", jwt("1", sub="1234", name="Ada")),
    ("id_token={}", jwt("2", sub="user-77", email_verified="yes")),
    ("curl -H 'x-auth: {}'", jwt("3", iss="auth", aud="api")),
    ("localStorage.token = '{}'", jwt("4", role="admin", uid="90210")),
    ("decode this: {}", jwt("5", a="b")),
    ("{}", pem("RSA PRIVATE KEY", 12)),
    ("the file says\n{}\nis it valid?", pem("PRIVATE KEY", 6)),
    ("{}", pem("OPENSSH PRIVATE KEY", 8)),
    ("key:\n{}", pem("EC PRIVATE KEY", 3)),
    ("{}", pem("ENCRYPTED PRIVATE KEY", 9)),
]
_URL = [
    ("DATABASE_URL=postgres://{}@db:5432/app", "admin:" + "tR4nquil0"),
    ("use amqp://{}@10.0.0.5/jobs", "worker:" + "s3cr3tQueue"),
    ("git remote add origin https://{}@example.org/x.git", "jane:" + "8f3kQz0pLm"),
    ("redis-cli -u redis://{}@cache:6379", "default:" + "hushHush99"),
    ("mongo mongodb+srv://{}@cluster0.example.net/test", "root:" + "Pa55w0rdXY"),
    ("curl http://{}@internal/api", "svc:" + "Zx81_2040"),
    ("ftp: ftp://{}@files.example.com/", "bob:" + "builder77"),
    ("proxy=http://{}@proxy:3128", "corp%5Cann:" + "Winter2024"),
    ("SQLALCHEMY = 'mysql+pymysql://{}@localhost/shop'", "shop:" + "basket!9"),
    ("smtp smtp://{}@mail.example.com:587", "mailer:" + "p0stb0x"),
]
_ADDRESS = [
    ("Ship it to {}.", "742 Evergreen Terrace, Springfield, OR 97477"),
    ("I live at {} now", "18 Marlowe Street"),
    ("Address: {}", "1600 Harbor View Blvd, Apt 12B"),
    ("meet me at {} at noon", "221 Baker Street, London"),
    ("Home: {}", "4087 N Willow Creek Rd, Tempe, AZ 85281"),
    ("mail to {}", "P.O. Box 2291, Duluth, MN 55803"),
    ("Lieferung an {}", "Lindenstraße 14, 10969 Berlin"),
    ("envoyer au {}", "27 rue de la Convention, 75015 Paris"),
    ("{} is where it happened", "95 Old Mill Lane"),
    ("pickup: {}", "3310 Kingsway Avenue, Suite 400"),
]
_SECRET = [
    ('password = "{}"', "vT9#kLq2!xWz"),
    ("API_KEY={}", noise("api", 32, HEX)),
    ("client_secret: {}", noise("client", 40)),
    ("DB_PASSWORD='{}'", "Gr4phite-Owl-77"),
    ('{{"secret_key": "{}"}}', noise("secret", 44, URLSAFE)),
    ("X-Api-Key: {}", noise("header", 36)),
    ("the password is {}", "Blue!Heron42"),
    ("auth_token => '{}'", noise("auth", 30)),
    ("SECRET_KEY_BASE={}", noise("rails", 64, HEX)),
    ("access_token={}&scope=all", noise("access", 38)),
]
_PERSON = [
    ("My name is {} and I need a refund.", "Ingrid Vasquez-Moreau"),
    ("Dear {},", "Dr. Oluwaseun Bakare"),
    ("{} was diagnosed in March.", "Patrick Hollings"),
    ("ask {} in accounting", "Mei-Ling Zhao"),
    ("Signed, {}", "Bartholomew K. Finch"),
    ("{}'s manager approved it", "Soraya Nazari"),
    ("Patient: {}", "Luca Brambilla"),
    ("my husband {} said no", "Gareth"),
    ("tenant {} owes two months", "Anneliese Trautmann"),
    ("I am {} from flat 3", "Devika Raman"),
]
POSITIVES = [
    Labelled(kind, text.format(value), value)
    for kind, cases in {
        "EMAIL": _EMAIL,
        "PHONE": _PHONE,
        "CREDIT_CARD": _CARD,
        "IBAN": _IBAN,
        "IP_ADDRESS": _IP,
        "US_SSN": _SSN,
        "provider key": _KEY,
        "JWT, PEM": _TOKEN,
        "URL_CREDENTIALS": _URL,
        "STREET_ADDRESS": _ADDRESS,
        "SECRET": _SECRET,
        "person's name": _PERSON,
    }.items()
    for text, value in cases
]

# Texts as programmers, students and operators write them, without private data.
NEGATIVES = [
    "pip install torch==2.13.0 numpy==1.26.4",
    "sglang 0.5.23 and vllm 0.32.0 on Python 3.11.7",
    "Version 10.15.7.1 broke the build",
    "upgrade openssl to v1.1.1.1 first",
    "listen on 127.0.0.1:8080 and 0.0.0.0",
    "import numpy as np; a = np.array([1, 2, 3])",
    "x = 3.14159265358979, y = 2.718281828459045",
    "1234567890123456 * 9 = 11111111101111104",
    "order 4111111111111112 failed the checksum",
    "def f(a, b): return a @ b.T",
    "@app.route('/users/<int:user_id>')",
    "git clone git@github.com:pallets/flask.git",
    "commit 9f2c1e7ab34d5e6f708192a3b4c5d6e7f8091a2b fixed it",
    "sha256:b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    "uuid 550e8400-e29b-41d4-a716-446655440000",
    "The meeting is on 2026-11-21 at 14:30:00.",
    "2026-11-21T12:37:59.123456Z INFO worker 12 started",
    "Solve 12x + 345 = 6789 for x.",
    "What is 987654321 divided by 123456789?",
    "There were 1,250,000 visitors in 2019, 1,310,500 in 2020.",
    "A train leaves at 9:15 and arrives at 11:47.",
    "Natalia sold 48 clips in April and half as many in May.",
    "SELECT id, email FROM users WHERE id = 42;",
    "const token = await getToken();",
    "password = os.environ['DB_PASSWORD']",
    "password: str | None = None",
    "Enter your password and press return.",
    "api_key = 'YOUR_API_KEY'",
    "secret = get_secret('prod/db')",
    "export TOKEN=$GITHUB_TOKEN",
    "max_tokens=4096, temperature=0.7",
    "self.token_ids = [101, 2054, 2003, 102]",
    "for i in range(1000000007): pass",
    "phone_number = models.CharField(max_length=20)",
    "Write a regular expression for an e-mail address like name@domain.",
    "https://docs.python.org/3/library/re.html#re.compile",
    "http://localhost:30000/v1/chat/completions",
    "the ratio is 16:9 and the resolution 1920x1080",
    "MAC 00:1B:44:11:3A:B7 on eth0",
    "std::vector<int>::iterator it = v.begin();",
    "foo::bar::baz and a::b",
    "0x7ffee4c0b5a8 points to the heap",
    "chmod 755 run.sh && ./run.sh --seed 20240917",
    "ISBN 978-3-16-148410-0",
    "Section 3.2.1.4 describes the protocol.",
    "pi to 30 digits: 3.141592653589793238462643383279",
    "matrix [[1, 0, 0], [0, 1, 0], [0, 0, 1]]",
    "I walked 5 miles down the street and saw 3 lanes.",
    "In 1999 Way Out West played 12 shows.",
    "The 4th Avenue entrance was closed.",
    "He scored 30 points in 25 minutes, on the road.",
    "image@2x.png and icon@3x.webp",
    "$ 4,500,000,000 in revenue, up 12.5 %",
    "ts=1732192679 pid=48213 latency_ms=1250",
    "1732192679123 is a timestamp in milliseconds",
    "H2O, C6H12O6 and 6.02214076e23",
    "base64.b64encode(b'hello world').decode()",
    "Lorem ipsum dolor sit amet, consectetur adipiscing elit.",
    "color: #ff8800; margin: 10px 20px 30px 40px;",
    "tracking number 1Z999AA10123456784",
    "SKU 536-22-87 and part 12-3456-78",
    "eyJ is how base64 of an opening brace and quote begins",
    "-----BEGIN PUBLIC KEY----- is followed by base64",
    "sk-learn is short for scikit-learn; hf_transfer is a package",
]
